"""What comes in: whose request begins next, and its body, decoded and counted."""
