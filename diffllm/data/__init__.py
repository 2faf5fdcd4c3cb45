"""Data pipeline: text corpora, tokenizers, token shards and training batches.

Importing this package registers the built-in text sources.
"""

import diffllm.data.text.files
import diffllm.data.text.hub
import diffllm.data.text.packages
import diffllm.data.text.synthetic  # noqa: F401
