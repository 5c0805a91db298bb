"""What an explorer and a trainer in separate processes hand to each other: rollouts one way, weights the other."""
