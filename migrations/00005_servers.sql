-- +goose Up
-- Several servers on one ledger: where the others reach a server, and what it
-- runs, so that a call on a session finds a server that can do it. Servers of
-- before have no address; nobody asks them.
ALTER TABLE servers
    ADD COLUMN address      text NOT NULL DEFAULT '' CHECK (length(address) <= 2048),
    ADD COLUMN model        text NOT NULL DEFAULT '',
    ADD COLUMN model_digest text NOT NULL DEFAULT '',
    ADD COLUMN parity_class text NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE servers DROP COLUMN address, DROP COLUMN model, DROP COLUMN model_digest, DROP COLUMN parity_class;
