"""What a training run will take, before it is started."""
