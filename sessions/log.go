package sessions

import "context"

// Log is a session's event log. Readers hold an offset (the next seq they
// want), never a channel: a slow one only lags.
type Log struct{}

// Start turns what a client knows into the first seq to read. epoch is the
// last one it saw, 0 for none: when that is over, the stream starts at the
// next epoch's first event if from lies behind it.
func (l *Log) Start(ctx context.Context, from, epoch int64) (int64, error) { return from, nil }

// Read returns up to max events from seq from on, from memory or from the
// ledger; none when from is past the end. CodeGone when they are purged.
func (l *Log) Read(ctx context.Context, from int64, max int) ([]Event, error) { return nil, nil }

// Wait returns when an event with seq >= from can be read (true), or when
// there will never be one, the session being deleted (false).
func (l *Log) Wait(ctx context.Context, from int64) (bool, error) { return false, nil }

// Last returns the current epoch and the seq of the newest visible event.
func (l *Log) Last() (epoch, seq int64) { return 0, 0 }
