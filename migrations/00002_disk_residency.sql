-- +goose Up
-- What is on a disk outlives the server that put it there, so rows of the disk
-- tier stay when their server goes; the others are removed with it by name.
ALTER TABLE residency DROP CONSTRAINT residency_server_id_fkey;

-- +goose Down
DELETE FROM residency WHERE server_id NOT IN (SELECT id FROM servers);
ALTER TABLE residency ADD CONSTRAINT residency_server_id_fkey FOREIGN KEY (server_id) REFERENCES servers (id) ON DELETE CASCADE;
