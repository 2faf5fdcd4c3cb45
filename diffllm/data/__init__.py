"""The data pipeline: corpus, tokenizer, token shards, loader (README.md).

Importing this package registers the built-in sources of text.
"""

import diffllm.data.text.files
import diffllm.data.text.hub
import diffllm.data.text.packages
import diffllm.data.text.synthetic  # noqa: F401
