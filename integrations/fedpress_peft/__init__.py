"""Federated fine-tuning of Hugging Face models by the adapters of PEFT."""
