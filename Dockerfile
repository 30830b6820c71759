# Rocket with the nano model inside: docker build -t rocket .
# The image holds the binary and glibc; the ledger is a Postgres elsewhere (see docker-compose.yml).

FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN go build -trimpath -ldflags "-s -w" -o /out/rocket ./cmd/rocket

FROM debian:bookworm-slim
COPY --from=build /out/rocket /usr/local/bin/rocket
# A fixed number, so that the owner of a mounted volume can be set without looking inside the image.
RUN mkdir -p /var/lib/rocket && chown 65532:65532 /var/lib/rocket
USER 65532:65532
ENV HOME=/var/lib/rocket
VOLUME /var/lib/rocket
STOPSIGNAL SIGTERM
ENTRYPOINT ["rocket"]
CMD ["serve"]
