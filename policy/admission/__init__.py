"""Which of the calls that wait in the gateway goes next. The tenants share by tokens."""
