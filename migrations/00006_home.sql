-- +goose Up
-- Which data directory a server holds the lock of: two processes cannot hold
-- one, so a server that starts with it knows that the one before is gone. ''
-- is none.
ALTER TABLE servers ADD COLUMN home text NOT NULL DEFAULT '' CHECK (length(home) <= 64);

-- +goose Down
ALTER TABLE servers DROP COLUMN home;
