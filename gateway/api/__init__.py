"""The routes: what a client may ask, who may ask it, and the shape of what is answered."""
