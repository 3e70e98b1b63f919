"""Write jax_random.json: what jax.random gives for each call of jax_random_cases.py. Needs jax; run it by hand.

python tests/golden/make_jax_random.py

What this version of jax has been recorded with stays as it is: how XLA rounds depends on the CPU.
"""

import base64
import json
import runpy
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES = runpy.run_path(str(HERE / "jax_random_cases.py"))


def in_jax(call: str) -> Any:
    """The NumPy array that the call gives in JAX."""
    import jax
    import numpy as np

    with jax.enable_x64(any(wide in call for wide in ("int64", "float64", "complex128"))):
        scope: dict[str, Any] = {name: getattr(jax.numpy, name) for name in CASES["DTYPES"]}
        scope |= vars(jax.random)
        scope |= {"key": jax.random.key(7), "ints": jax.numpy.array}
        scope["array"] = lambda values: jax.numpy.array(values, jax.numpy.float32)
        return np.asarray(eval(call, scope))


if __name__ == "__main__":
    import jax

    assert jax.config.jax_threefry_partitionable
    file = HERE / "jax_random.json"
    recorded = json.loads(file.read_text())
    golden: dict[str, Any] = {"jax": jax.__version__}
    for call in CASES["EXACT"] + CASES["CLOSE"]:
        if recorded["jax"] == jax.__version__ and call in recorded:
            golden[call] = recorded[call]
        else:
            out = in_jax(call)
            golden[call] = [str(out.dtype), list(out.shape), base64.b64encode(out.tobytes()).decode()]
    lines = ",\n".join(f"{json.dumps(call)}: {json.dumps(value)}" for call, value in golden.items())
    file.write_text(f"{{\n{lines}\n}}\n")
