"""Parts of `estimates`: engines that do not report, what makes their estimates wrong, and gateways of them."""
