package sessions

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// pingTimeMax bounds the look at a connection that has not been used for a
// second. One that swallows what it is given would else cost its first user
// all of its time, and there may be as many as the pool holds.
const pingTimeMax = 2 * time.Second

// connectTimeMax bounds the making of a connection, unless the database's URL
// says otherwise: as long as it goes on it takes up a place of the pool.
const connectTimeMax = 5 * time.Second

// ledger is the pool of connections. Its statements that are no part of a
// transaction end after a while even if the caller's context does not: a
// connection may be gone without anybody being told, and a client that waits
// for ever is no better off than one that gets an error.
type ledger struct {
	*pgxpool.Pool
	most time.Duration // that one statement may take
}

// late lets go of all connections when one has not answered in time: the others
// may be as dead, and each would cost somebody as much to find out.
func (l ledger) late(ctx context.Context) {
	if ctx.Err() == context.DeadlineExceeded {
		l.Reset()
	}
}

func (l ledger) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	ctx, cancel := l.bound(ctx)
	defer cancel()
	return l.Pool.Exec(ctx, sql, args...)
}

func (l ledger) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	ctx, cancel := l.bound(ctx)
	rows, err := l.Pool.Query(ctx, sql, args...)
	if err != nil {
		cancel()
		return nil, err
	}
	return &boundRows{rows, cancel}, nil
}

func (l ledger) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	ctx, cancel := l.bound(ctx)
	return boundRow{l.Pool.QueryRow(ctx, sql, args...), cancel}
}

// bound gives a statement its time. cancel must be called at its end.
func (l ledger) bound(ctx context.Context) (bound context.Context, cancel func()) {
	bound, stop := context.WithTimeout(ctx, l.most)
	return bound, func() {
		if ctx.Err() == nil { // not the caller's own patience
			l.late(bound)
		}
		stop()
	}
}

// boundRows give up their time when they are closed, which reading them to the
// end does.
type boundRows struct {
	pgx.Rows
	cancel func()
}

func (r *boundRows) Next() bool {
	more := r.Rows.Next()
	if !more {
		r.cancel()
	}
	return more
}

func (r *boundRows) Close() {
	r.Rows.Close()
	r.cancel()
}

type boundRow struct {
	pgx.Row
	cancel func()
}

func (r boundRow) Scan(dest ...any) error {
	defer r.cancel()
	return r.Row.Scan(dest...)
}
