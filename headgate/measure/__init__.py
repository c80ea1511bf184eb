"""What things cost: interleaved times, memory, ops, whole training steps, gates."""
