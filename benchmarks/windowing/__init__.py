"""Parts of `windows`: engines with sliding windows, and gateways of them."""
