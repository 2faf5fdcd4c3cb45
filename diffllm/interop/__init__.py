"""Models in and out; importing this makes our own architecture known to transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from diffllm.interop.modeling_diffllm import DiffLLMConfig, DiffLLMForCausalLM, DiffLLMModel

AutoConfig.register(DiffLLMConfig.model_type, DiffLLMConfig, exist_ok=True)
AutoModel.register(DiffLLMConfig, DiffLLMModel, exist_ok=True)
AutoModelForCausalLM.register(DiffLLMConfig, DiffLLMForCausalLM, exist_ok=True)
# With these, save_pretrained also writes the modelling file, which opens without diffllm.
DiffLLMConfig.register_for_auto_class("AutoConfig")
DiffLLMModel.register_for_auto_class("AutoModel")
DiffLLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
