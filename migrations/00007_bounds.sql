-- +goose Up
-- An epoch rises by one with each takeover, and clients may have numbers that
-- are doubles, so it stays below 2^53. A ledger may have larger ones of an
-- import; they become 2^40 in the session and in its log, whose order that
-- leaves as it is. Takeovers fail with the last that a bigint holds.
UPDATE events e SET epoch = 1099511627776 FROM sessions s
    WHERE s.epoch > 281474976710656 AND e.tenant_id = s.tenant_id AND e.session_id = s.id AND e.epoch > 1099511627776;
UPDATE token_runs r SET epoch = 1099511627776 FROM sessions s
    WHERE s.epoch > 281474976710656 AND r.tenant_id = s.tenant_id AND r.session_id = s.id AND r.epoch > 1099511627776;
UPDATE sessions SET epoch = 1099511627776, gone_epoch = least(gone_epoch, 1099511627776), rev = rev + 1
    WHERE epoch > 281474976710656;
ALTER TABLE sessions ADD CONSTRAINT sessions_epoch_max CHECK (epoch < 9007199254740992);
-- what is there is bounded by its session's: no need to read all of it
ALTER TABLE events ADD CONSTRAINT events_epoch_max CHECK (epoch < 9007199254740992) NOT VALID;
ALTER TABLE token_runs ADD CONSTRAINT token_runs_epoch_max CHECK (epoch < 9007199254740992) NOT VALID;

-- +goose Down
ALTER TABLE token_runs DROP CONSTRAINT token_runs_epoch_max;
ALTER TABLE events DROP CONSTRAINT events_epoch_max;
ALTER TABLE sessions DROP CONSTRAINT sessions_epoch_max;
