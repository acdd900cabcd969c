"""The parts of `neighbours`: what one tenant does, and what another one notices."""
