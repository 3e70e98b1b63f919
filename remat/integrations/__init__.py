"""Remat in other libraries."""

from remat.integrations import transformers as transformers
