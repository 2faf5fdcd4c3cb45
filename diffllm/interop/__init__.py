"""Models in and out; importing this makes our own architecture known to transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from diffllm.interop.modeling_diffllm import DiffLLMConfig, DiffLLMForCausalLM, DiffLLMModel

AutoConfig.register(DiffLLMConfig.model_type, DiffLLMConfig, exist_ok=True)
AutoModel.register(DiffLLMConfig, DiffLLMModel, exist_ok=True)
AutoModelForCausalLM.register(DiffLLMConfig, DiffLLMForCausalLM, exist_ok=True)
