"""Run the Python of a README with the installed remat, as a user's first program: `python -I run_readme.py FILE`."""

import re
import sys
from pathlib import Path

import remat

assert "site-packages" in remat.__file__, f"not the installed one: {remat.__file__}"
namespace: dict[str, object] = {}
for block in re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(), re.MULTILINE | re.DOTALL):
    exec(block, namespace)
print(f"the README runs with remat {remat.__version__} in {Path(remat.__file__).parent}")
