"""The guest that has files and batches."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from tempfile import gettempdir
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from plait.backends.errors import NoEngineError, PlaitError
from plait.gateway.api.call_api import CallApi
from plait.gateway.calls.routes import CHAT_PATH, ROUTES, TEXT_PATH
from plait.gateway.doors import Guest, House
from plait.gateway.guests.batches.desk import TABLES, Desk
from plait.gateway.guests.batches.feeder import Feeder
from plait.gateway.guests.batches.routes import BatchRoutes
from plait.gateway.guests.batches.runner import Runner
from plait.gateway.guests.forms.multipart_api import FormApi
from plait.gateway.tables import TablesError, TablesThread, in_postgresql, in_sqlite

ENDPOINTS: Final = (
    CHAT_PATH, TEXT_PATH, "/v1/responses", "/v1/messages",
    *(path for path in ROUTES if path not in {CHAT_PATH, TEXT_PATH, "/v1/audio/speech", "/v1/images/generations"}),
)  # fmt: skip
EXPIRE_S: Final = 600.0


class BatchesGuest(Guest):
    """Its tables are in `[store] url`, in a file beside `[store] path`, or in a temporary file. It needs forms."""

    def __init__(self, house: House) -> None:
        self._house, kernel, _ = house, house.kernel, house[FormApi]  # uploads are read by its reader
        config, accounts = kernel.config, house.accounts
        self._folder = Path(gettempdir()) / f"plait-files-{token_hex(8)}"  # made where there is no other place
        file = self._folder / "files.db" if accounts is None else accounts.with_suffix(".files")
        database = in_sqlite(TABLES, file) if config.store.url is None else in_postgresql(TABLES, config.store.url)
        self._desk, self._thread = Desk(database), TablesThread("batches", database.interrupt)
        self._sweep = asyncio.Event()
        self._runner = Runner(
            self._desk, self._thread, Feeder(kernel.router, kernel.admission), lambda: house[CallApi],
            serves=self._serves, weights=kernel.admission.shares.weights, ended_keys=kernel.keys.ended,
        )  # fmt: skip
        self.routes = BatchRoutes(
            self._desk, self._thread, kernel.keys, kernel.bodies, kernel.tenants,
            endpoints=ENDPOINTS, wake=self._runner.wake, sweep=self._sweep.set,
        ).routes  # fmt: skip

    def start(self) -> None:
        kernel = self._house.kernel
        kernel.registry.register(self)
        kernel.supervisor.start("batches", self._runner.keep)
        kernel.supervisor.start("batch-lines", self._runner.send)
        kernel.supervisor.start("old-files", self._expire)

    async def stop(self) -> None:
        await self._runner.close()
        await self._thread.close(self._desk.close)
        rmtree(self._folder, ignore_errors=True)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The batches of this gateway, for `/metrics`."""
        ended = CounterMetricFamily(
            "plait_batch_lines", "Lines of batches that have ended", labels=["model", "outcome"]
        )
        for (model, outcome), count in self._runner.keeper.counts.items():
            ended.add_metric([model, outcome], count)
        yield ended
        runs = list(self._runner.running.values())
        status = Counter(run.batch.status for run in runs)
        blocked = Counter(why for run in runs if (why := self._runner.why_blocked(run)))
        for name, label, counts, text in (
            ("plait_batches", "status", status, "Batches here that have not ended"),
            ("plait_batches_blocked", "why", blocked, "Batches here that do not go on now"),
        ):
            gauge = GaugeMetricFamily(name, text, labels=[label])
            for value, count in counts.items():
                gauge.add_metric([value], count)
            yield gauge
        left, sent = sum(len(run.left) for run in runs), sum(len(run.asked) for run in runs)
        window = max((run.window for run in runs), default=0.0)
        for name, text, number in (
            ("plait_batch_lines_left", "Lines of batches here that are not sent yet", left),
            ("plait_batch_lines_running", "Lines of batches here that are sent, or are sent again", sent),
            ("plait_batch_window", "The most that a batch here will take of its window", window),
        ):
            yield GaugeMetricFamily(name, text, number)

    def _serves(self, model: str) -> bool:
        try:
            self._house.kernel.router.models.check(model)
        except NoEngineError:
            return True  # an engine may come
        except PlaitError:
            return False
        return True

    async def _expire(self) -> None:
        while True:
            self._sweep.clear()
            with suppress(TablesError):
                while await self._thread.run(self._desk.expire, time.time()):
                    pass
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sweep.wait(), EXPIRE_S)
