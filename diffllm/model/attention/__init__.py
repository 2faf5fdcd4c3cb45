"""Attention variants, one file per variant; `diffllm.model` imports all modules of this folder."""
