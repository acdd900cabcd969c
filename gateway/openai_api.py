"""`/v1/chat/completions` and `/v1/completions`: from an HTTP request to a call that can be placed.

A plain ASGI callable, since these two routes are the data path; everything else is served by Starlette (`app`).
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass

import structlog
from starlette.types import Receive, Scope, Send

from backends.errors import ContextLengthError, MethodNotAllowedError, PlaitError, UnsupportedError
from backends.openai_protocol import ChatRequest, CompletionRequest, parse_request
from gateway.annotations import Annotations, read_annotations
from gateway.asgi import ClientGoneError, Headers, header, read_body, send_error
from gateway.auth import KeyRing
from gateway.outgoing import OutgoingBody
from gateway.relay import Delivery, Relay
from gateway.router import Router
from gateway.tokenization import PromptReader
from policy.types import Call

KINDS: dict[str, type[ChatRequest | CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}

OFF_LOOP_BYTES = 16 * 1024
"""Bodies above this are tokenized in a thread: at some 4,000 tokens everybody else would wait for 2 ms or more."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it came in; `tenant` is whose key it showed."""

    path: str
    headers: Headers
    body: bytes
    request_id: str
    arrived_s: float
    tenant: str


@dataclass(frozen=True, slots=True)
class CompletionApi:
    """The ASGI application of the two routes in `KINDS`."""

    router: Router
    relay: Relay
    prompts: PromptReader
    keys: KeyRing
    max_body_bytes: int
    isolate_tenants: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST; every failure before the first byte becomes an OpenAI error object."""
        headers: Headers = scope["headers"]
        arrived_s = asyncio.get_running_loop().time()
        request_id = header(headers, b"x-request-id") or uuid.uuid4().hex
        try:
            tenant = self.keys.check(headers)
            if scope["method"] != "POST":
                raise MethodNotAllowedError(f"{scope['path']} takes POST requests only.")
            body = await read_body(receive, headers, self.max_body_bytes)
            incoming = Incoming(scope["path"], headers, body, request_id, arrived_s, tenant)
            delivery = await self._prepare(incoming)
            await self.relay.deliver(delivery, receive, send)
        except ClientGoneError:
            log.info("client gone", request_id=request_id)
        except PlaitError as error:
            log.info("refused", request_id=request_id, status=error.status, code=error.code, message=error.message)
            await send_error(send, error, request_id)

    async def _prepare(self, incoming: Incoming) -> Delivery:
        body = incoming.body
        request = parse_request(body, KINDS[incoming.path])
        annotations = read_annotations(incoming.headers, request.plait)
        _refuse_unbuilt(annotations)
        self.router.check_model(request.model)
        cache_salt = self._cache_salt(request, incoming.tenant)
        if len(body) > OFF_LOOP_BYTES:
            prompt = await asyncio.to_thread(self.prompts.read, request, cache_salt)
        else:
            prompt = self.prompts.read(request, cache_salt)
        if prompt.exact:
            self._check_context(request, prompt.tokens)
        call = Call(
            incoming.request_id,
            request.model,
            prompt.tokens,
            self.router.block_tokens,
            prompt.block_hashes,
            slo=annotations.slo,
            objective=annotations.objective,
            priority=annotations.priority,
        )
        takes_ids = isinstance(request, CompletionRequest) and prompt.exact and not request.echo
        outgoing = OutgoingBody(body, request, prompt.prompts if takes_ids else None, cache_salt)
        return Delivery(call, incoming.path, incoming.headers, outgoing, incoming.arrived_s)

    def _cache_salt(self, request: ChatRequest | CompletionRequest, tenant: str) -> str | None:
        """What keeps this call's cached prefixes apart from others': the client's own salt, behind its tenant's."""
        if not self.isolate_tenants:
            return request.cache_salt
        return f"{tenant}:{request.cache_salt}" if request.cache_salt else tenant

    def _check_context(self, request: ChatRequest | CompletionRequest, prompt_tokens: int) -> None:
        context_tokens = self.router.context_tokens(request.model)
        needed = prompt_tokens + (request.output_limit or 1)
        if context_tokens is not None and needed > context_tokens and request.single_prompt:
            raise ContextLengthError(
                f"The model '{request.model}' has a context of {context_tokens} tokens; the request needs {needed}: "
                f"{prompt_tokens} of prompt and {request.output_limit or 1} of output. Shorten one of them.",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
            )


def _refuse_unbuilt(annotations: Annotations) -> None:
    """Semantic variables are understood but not run yet: ignoring them would give wrong answers."""
    for name, value in (("plait-inputs", annotations.inputs), ("plait-output", annotations.output)):
        if value:
            raise UnsupportedError(f"'{name}': semantic variables are not supported by this version.", param=name)
