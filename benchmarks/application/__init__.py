"""Application experiments in virtual time: programs of calls, the clients that run them, and what became of them."""
