"""What an alarm that watches every layer sees, and what it cannot."""
