package sessions

import "context"

// WatchOptions narrows a watch.
type WatchOptions struct {
	Root  string // only this tree
	Turns bool   // also turn.* events, without deltas
}

// Watch is a reader of the events of many sessions. It holds an offset in a
// bounded ring; one that lags past it loses the oldest and is told so.
type Watch struct{}

// Next waits for events and returns them. lost is how many were overwritten
// since the last call: the caller should list the sessions anew.
func (w *Watch) Next(ctx context.Context) (events []Event, lost int64, err error) {
	<-ctx.Done()
	return nil, 0, ctx.Err()
}
