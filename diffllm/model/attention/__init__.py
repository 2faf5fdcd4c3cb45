"""The attention variants: one file each; `diffllm.model` imports every module of this folder."""
