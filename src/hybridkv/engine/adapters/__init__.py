"""LoRA adapters by name: read from the folders that peft writes, and added to the linear layers of a stock model."""
