-- +goose Up

-- Who may call, how much each tenant may have, and what was done that an
-- operator wants to find again.

ALTER TABLE tenants
    -- What keeps one tenant's cached pages apart from another's. From the
    -- server, never from a request: who could name a salt could ask what
    -- others' prompts were.
    ADD COLUMN salt              text    NOT NULL DEFAULT gen_random_uuid()::text CHECK (length(salt) BETWEEN 1 AND 128),
    -- Quotas. NULL: the server's default. 0: none at all.
    ADD COLUMN sessions          integer CHECK (sessions >= 0),
    ADD COLUMN concurrent_turns  integer CHECK (concurrent_turns >= 0),
    ADD COLUMN tokens_per_minute integer CHECK (tokens_per_minute >= 0),
    -- of the tenant's lines in the memory of a server's device and host; what is
    -- on a disk is not limited
    ADD COLUMN resident_bytes    bigint  CHECK (resident_bytes >= 0);
-- what is on a disk from before there were salts is this tenant's, under its name
UPDATE tenants SET salt = 'local' WHERE id = 'local';

CREATE TABLE api_keys (
    tenant_id    text        NOT NULL REFERENCES tenants (id),
    id           uuid        NOT NULL,
    name         text        NOT NULL DEFAULT '' CHECK (length(name) <= 256),
    -- SHA-256 of a secret of 260 random bits. The secret is nowhere; there is
    -- nothing in it to guess, so a slow hash would protect nothing.
    hash         bytea       NOT NULL CHECK (octet_length(hash) = 32),
    -- may read what is about the whole server: metrics, stats, cache checks.
    -- Not other tenants' sessions: no key can.
    admin        boolean     NOT NULL DEFAULT false,
    created_at   timestamptz NOT NULL DEFAULT now(),
    revoked_at   timestamptz,
    last_used_at timestamptz, -- to about a minute

    PRIMARY KEY (tenant_id, id)
);
-- the one lookup that knows no tenant: the tenant is what it is for
CREATE UNIQUE INDEX api_keys_hash ON api_keys (hash);

CREATE TABLE audit_events (
    id        bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at        timestamptz NOT NULL DEFAULT now(),
    -- null: nobody knows whose; a key that nobody has was tried
    tenant_id text        REFERENCES tenants (id),
    -- who did it; null: the operator at the command line, or a server without keys
    key_id    uuid,
    action    text        NOT NULL CHECK (action IN ('key.created', 'key.revoked', 'tenant.limits', 'session.deleted', 'auth.failed')),
    subject   text        NOT NULL DEFAULT '', -- id of what it was done to
    -- how many times: failed authentications are written together
    count     integer     NOT NULL DEFAULT 1 CHECK (count >= 1)
);
CREATE INDEX audit_events_tenant ON audit_events (tenant_id, at);

-- +goose Down
DROP TABLE audit_events, api_keys;
ALTER TABLE tenants DROP COLUMN salt, DROP COLUMN sessions, DROP COLUMN concurrent_turns,
    DROP COLUMN tokens_per_minute, DROP COLUMN resident_bytes;
