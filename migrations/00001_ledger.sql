-- +goose Up

-- The ledger: what is true about lines of tokens and their lineage. Pages,
-- states and tiers are caches of it. Every table and every unique key carries
-- the tenant first, so that no query can reach another tenant's rows by an id
-- alone, and so that one tenant's rows lie together in every index.

CREATE TABLE tenants (
    id         text        PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 64),
    created_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO tenants (id) VALUES ('local');

-- A server's lease, by this database's clock. A server also holds the advisory
-- lock hashtextextended(id, 0): it goes with the connection, so a crashed
-- server is known dead before its lease runs out. A server that lost both but
-- lives is fenced by (owner_server, epoch) below, so a wrong guess costs work,
-- never truth.
CREATE TABLE servers (
    id          uuid        PRIMARY KEY,
    started_at  timestamptz NOT NULL DEFAULT now(),
    lease_until timestamptz NOT NULL
);

CREATE TABLE sessions (
    tenant_id        text        NOT NULL REFERENCES tenants (id),
    id               uuid        NOT NULL,
    parent_id        uuid,
    -- offset in the parent's line; this session's own tokens start here
    forked_at        integer,
    root_id          uuid        NOT NULL,

    -- what the tokens and any cached state of them mean
    model            text        NOT NULL,
    model_digest     text        NOT NULL,
    tokenizer_digest text        NOT NULL,
    parity_class     text        NOT NULL,

    -- running: a turn is queued or running. detached is what the client asked
    -- for, not where bytes are. No state in between is ever stored.
    state            text        NOT NULL DEFAULT 'idle'
                     CHECK (state IN ('idle', 'running', 'detached', 'closed')),
    -- every write by an owner names (owner_server, epoch); a takeover raises the epoch
    owner_server     uuid        REFERENCES servers (id),
    epoch            bigint      NOT NULL DEFAULT 1 CHECK (epoch >= 1),
    -- counts the writes: tells an owner whose commit got no answer whether it happened
    rev              bigint      NOT NULL DEFAULT 1,

    length           integer     NOT NULL DEFAULT 0,
    last_seq         bigint      NOT NULL DEFAULT 0 CHECK (last_seq >= 0),
    turn_count       integer     NOT NULL DEFAULT 0,
    child_count      integer     NOT NULL DEFAULT 0,

    title            text        NOT NULL DEFAULT '',
    labels           jsonb       NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(labels) = 'object'),
    pin              boolean     NOT NULL DEFAULT false,
    ttl_seconds      integer     CHECK (ttl_seconds > 0),

    created_at       timestamptz NOT NULL,
    updated_at       timestamptz NOT NULL,
    expires_at       timestamptz,
    closed_at        timestamptz,
    deleted_at       timestamptz,
    -- a deleted session keeps the prefix of its line that living descendants read
    kept_to          integer     CHECK (kept_to >= 0),

    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, parent_id) REFERENCES sessions (tenant_id, id),
    CHECK ((parent_id IS NULL) = (forked_at IS NULL)),
    CHECK ((parent_id IS NULL) = (root_id = id)),
    CHECK (length >= coalesce(forked_at, 0) AND coalesce(forked_at, 0) >= 0),
    CHECK ((closed_at IS NOT NULL) = (state = 'closed')),
    CHECK (deleted_at IS NULL OR state = 'closed'),
    CHECK ((deleted_at IS NULL) = (kept_to IS NULL))
);
-- ids are UUIDv7, so the primary key is also the newest-first order of lists
CREATE INDEX sessions_parent ON sessions (tenant_id, parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX sessions_root ON sessions (tenant_id, root_id);
CREATE INDEX sessions_owner ON sessions (owner_server) WHERE owner_server IS NOT NULL;
CREATE INDEX sessions_expires ON sessions (expires_at)
    WHERE expires_at IS NOT NULL AND state IN ('idle', 'detached');
CREATE INDEX sessions_labels ON sessions USING gin (labels jsonb_path_ops) WHERE deleted_at IS NULL;

CREATE TABLE turns (
    tenant_id     text        NOT NULL,
    id            uuid        NOT NULL,
    session_id    uuid        NOT NULL,
    state         text        NOT NULL DEFAULT 'queued'
                  CHECK (state IN ('queued', 'running', 'completed', 'cancelled', 'failed', 'interrupted')),
    -- the checked request with its defaults, so that a queued turn runs the
    -- same after a restart
    request       jsonb       NOT NULL,
    seed          bigint      NOT NULL CHECK (seed >= 0),
    prompt        integer[]   NOT NULL,

    -- [tok_from, prompt_to) is the prompt, [prompt_to, tok_to) the generated
    -- part. A turn that ended in the queue never joined the line: tok_to = tok_from.
    tok_from      integer     NOT NULL CHECK (tok_from >= 0),
    prompt_to     integer     NOT NULL,
    tok_to        integer     NOT NULL,

    text          text        NOT NULL DEFAULT '',
    finish_reason text        CHECK (finish_reason IN ('end_token', 'stop_string', 'length', 'context_limit',
                                                       'tool_calls', 'cancelled', 'interrupted', 'error')),
    usage         jsonb,
    error         jsonb,
    logprobs      jsonb,
    created_at    timestamptz NOT NULL,
    started_at    timestamptz,
    ended_at      timestamptz,

    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE,
    CHECK (prompt_to = tok_from + cardinality(prompt)),
    CHECK (tok_to >= prompt_to OR (tok_to = tok_from AND started_at IS NULL)),
    CHECK ((ended_at IS NOT NULL) = (state NOT IN ('queued', 'running'))),
    CHECK ((finish_reason IS NOT NULL) = (state NOT IN ('queued', 'running'))),
    CHECK (state NOT IN ('running', 'completed', 'interrupted') OR started_at IS NOT NULL),
    CHECK (state <> 'queued' OR started_at IS NULL)
);
-- one turn at a time, whatever the server believes
CREATE UNIQUE INDEX turns_one_open ON turns (tenant_id, session_id) WHERE state IN ('queued', 'running');
CREATE INDEX turns_session ON turns (tenant_id, session_id, id);

-- Generated text is never tokenised again: these ids are the line. One row per
-- flush of the writer; a turn's rows are merged into one when it ends.
CREATE TABLE token_runs (
    tenant_id  text        NOT NULL,
    session_id uuid        NOT NULL,
    tok_from   integer     NOT NULL CHECK (tok_from >= 0),
    ids        integer[]   NOT NULL CHECK (cardinality(ids) > 0),
    -- null: the prompt of a session, which no turn brought
    turn_id    uuid,
    -- Deltas are rebuilt from here, never stored twice: delta i has seq
    -- first_seq + i, the next cuts[i] of ids, and the time base_time + at_ms[i].
    -- A prompt has no deltas. A cut of 0 released text that was held back.
    first_seq  bigint      NOT NULL,
    cuts       smallint[]  NOT NULL DEFAULT '{}',
    at_ms      integer[]   NOT NULL DEFAULT '{}',
    base_time  timestamptz NOT NULL,
    epoch      bigint      NOT NULL,

    PRIMARY KEY (tenant_id, session_id, tok_from),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE,
    CHECK (cardinality(cuts) = cardinality(at_ms))
);
CREATE INDEX token_runs_seq ON token_runs (tenant_id, session_id, first_seq);

-- Everything of the log that is not a delta.
CREATE TABLE events (
    tenant_id  text        NOT NULL,
    session_id uuid        NOT NULL,
    seq        bigint      NOT NULL CHECK (seq >= 1),
    epoch      bigint      NOT NULL CHECK (epoch >= 1),
    type       text        NOT NULL,
    turn_id    uuid,
    time       timestamptz NOT NULL,
    data       jsonb       NOT NULL DEFAULT '{}',

    PRIMARY KEY (tenant_id, session_id, seq),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
);

-- Canonical items of chat histories, for finding a session by a resent history.
CREATE TABLE items (
    tenant_id  text    NOT NULL,
    session_id uuid    NOT NULL,
    turn_id    uuid,
    idx        integer NOT NULL CHECK (idx >= 0),
    kind       text    NOT NULL,
    json       jsonb   NOT NULL,
    tok_from   integer NOT NULL,
    tok_to     integer NOT NULL,
    chain_hash bytea   NOT NULL,

    PRIMARY KEY (tenant_id, session_id, idx),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE,
    CHECK (tok_to >= tok_from AND tok_from >= 0)
);
CREATE INDEX items_chain ON items (tenant_id, chain_hash);

-- A call's answer, written in the transaction of its effect: there is no
-- moment at which one exists without the other.
CREATE TABLE idempotency (
    tenant_id  text        NOT NULL,
    route      text        NOT NULL,
    key        text        NOT NULL,
    body_hash  bytea       NOT NULL,
    answer     jsonb       NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,

    PRIMARY KEY (tenant_id, route, key)
);
CREATE INDEX idempotency_expires ON idempotency (expires_at);

-- Where a session's bytes were last put, after the fact. A cache of caches:
-- rows of the device and host tiers mean nothing once their server is gone.
CREATE TABLE residency (
    tenant_id  text        NOT NULL,
    session_id uuid        NOT NULL,
    server_id  uuid        NOT NULL REFERENCES servers (id) ON DELETE CASCADE,
    tier       text        NOT NULL CHECK (tier IN ('device', 'host', 'disk')),
    tokens     integer     NOT NULL CHECK (tokens >= 0),
    snapshots  integer     NOT NULL CHECK (snapshots >= 0),
    updated_at timestamptz NOT NULL,

    PRIMARY KEY (tenant_id, session_id, server_id, tier),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
);

-- +goose Down
DROP TABLE residency, idempotency, items, events, token_runs, turns, sessions, servers, tenants;
