"""What a training run will take, before it starts."""
