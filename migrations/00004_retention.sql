-- +goose Up
-- Events older than a server keeps them go; lineage and tokens stay. What is
-- left of a log begins at first_seq. gone_epoch is the epoch of the newest
-- event that went: who has seen no later one may have missed the start of an
-- epoch, and must be told so.
ALTER TABLE sessions
    ADD COLUMN first_seq  bigint NOT NULL DEFAULT 1 CHECK (first_seq BETWEEN 1 AND last_seq + 1),
    ADD COLUMN gone_epoch bigint NOT NULL DEFAULT 0 CHECK (gone_epoch BETWEEN 0 AND epoch);

-- +goose Down
ALTER TABLE sessions DROP COLUMN first_seq, DROP COLUMN gone_epoch;
