# One image for the gateway and the embedded engines: `plait serve` or `plait engine`.
FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
COPY client client
COPY policy policy
COPY backends backends
COPY lab lab
COPY gateway gateway
RUN python -m venv /opt/plait \
    && /opt/plait/bin/pip install --no-cache-dir --constraint constraints.txt ".[huggingface,otel,postgresql]"

FROM python:3.13-slim
COPY --from=build /opt/plait /opt/plait
# Tokenizers that engines offer, or that are downloaded, are kept in /var/cache/plait. /var/lib/plait is for a store
# (docs/durability.md): a new volume that is mounted there gets its owner and mode.
RUN useradd --system --uid 999 --no-create-home plait \
    && install --directory --owner plait --mode 0700 /var/lib/plait
RUN install --directory --owner plait --mode 0700 /var/cache/plait
USER plait
ENV PATH=/opt/plait/bin:$PATH \
    XDG_CACHE_HOME=/var/cache/plait \
    HF_HOME=/var/cache/plait/huggingface \
    PYTHONUNBUFFERED=1
EXPOSE 8000
ENTRYPOINT ["plait"]
CMD ["serve", "--config", "/etc/plait/config.toml", "--host", "0.0.0.0"]
