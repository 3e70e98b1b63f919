"""Other libraries, with remat."""

from remat.integrations import transformers as transformers
