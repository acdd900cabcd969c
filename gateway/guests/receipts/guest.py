"""The guest that keeps a receipt of each call, and tells it."""

from __future__ import annotations

from functools import partial

from plait.gateway.doors import Guest, House
from plait.gateway.guests.receipts.explain import ExplainApi
from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.guests.receipts.routes import ReceiptsApi
from plait.gateway.guests.receipts.told import ToldReceipt
from plait.gateway.others import Others


class ReceiptsGuest(Guest):
    """Offers `Receipts`."""

    def __init__(self, house: House) -> None:
        kernel, most_bytes = house.kernel, house.kernel.config.receipts.max_bytes
        receipts = house.offer(Receipts, Receipts(most_bytes))
        others = house.find(Others) or Others()
        self.readers = [receipts]
        self.receipts = partial(ToldReceipt, receipts=receipts)
        self.routes = [
            *ReceiptsApi(receipts, kernel.keys, kernel.admin, kernel.tenants.label, others).routes,
            *ExplainApi(kernel.reader, kernel.calls, receipts, kernel.admin, kernel.bodies).routes,
        ]
