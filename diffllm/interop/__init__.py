"""Export and import Hugging Face models; the package registers DiffLLM models in transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from diffllm.interop.modeling_diffllm import DiffLLMConfig, DiffLLMForCausalLM, DiffLLMModel

AutoConfig.register(DiffLLMConfig.model_type, DiffLLMConfig, exist_ok=True)
AutoModel.register(DiffLLMConfig, DiffLLMModel, exist_ok=True)
AutoModelForCausalLM.register(DiffLLMConfig, DiffLLMForCausalLM, exist_ok=True)
# Makes save_pretrained write the modelling file too, so that a model loads without diffllm.
DiffLLMConfig.register_for_auto_class("AutoConfig")
DiffLLMModel.register_for_auto_class("AutoModel")
DiffLLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
