"""The data pipeline: corpus, tokenizer, token shards, loader (README.md).

Importing this registers the sources of text that come with the package.
"""

import diffllm.data.text.files
import diffllm.data.text.hub
import diffllm.data.text.packages
import diffllm.data.text.synthetic  # noqa: F401
