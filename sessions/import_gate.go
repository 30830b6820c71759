package sessions

import (
	"io"
	"sync"
	"time"
)

// An import goes at the pace of the client that sends it, and has a connection
// to the ledger for as long.
const (
	importsMax = 4 // at once, of different tenants, one of each; more: CodeOverloaded

	// importPatience is how long an import may have waited for its client, all
	// its waits together, before it gives way: when all places are taken and
	// another tenant wants one, the import that has waited for longest ends with
	// CodeOverloaded, and whoever came gets CodeOverloaded too, and the place when
	// it comes again.
	importPatience = 10 * time.Second

	// importFreeBytes is what each import may hold in memory (its longest line,
	// its sessions, a few words for each turn and run). What they hold beyond it
	// is importBytesMax of all and importTenantBytesMax of one; the next byte is
	// CodeOverloaded.
	importFreeBytes      = 1 << 20
	importBytesMax       = 512 << 20
	importTenantBytesMax = 256 << 20
)

// importGate lets imports through.
type importGate struct {
	mu     sync.Mutex
	places map[string]*importPlace // guarded by mu; by tenant
	bytes  int                     // guarded by mu; what all hold beyond what is free
}

// importPlace is one import's.
type importPlace struct {
	gate *importGate

	// Guarded by gate.mu.
	waited time.Duration // for the client, until since
	since  time.Time     // when the wait under way began; zero: none
	yield  bool          // another tenant wants the place
	bytes  int           // held
}

// enter gives a place, or CodeOverloaded. leave must be called after.
func (g *importGate) enter(tenant string, now time.Time) (p *importPlace, leave func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.places[tenant] != nil {
		return nil, nil, fail(CodeOverloaded, "another import is under way, try again")
	}
	if len(g.places) >= importsMax {
		g.hurryLocked(now)
		return nil, nil, fail(CodeOverloaded, "%d imports are under way, try again", importsMax)
	}
	if g.places == nil {
		g.places = map[string]*importPlace{}
	}
	p = &importPlace{gate: g}
	g.places[tenant] = p
	return p, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.bytes -= max(0, p.bytes-importFreeBytes)
		delete(g.places, tenant)
	}, nil
}

// hurryLocked tells the import that has waited for its client for longest to
// give way, if that is too long.
func (g *importGate) hurryLocked(now time.Time) {
	var slowest *importPlace
	for _, p := range g.places {
		if slowest == nil || p.waitedLocked(now) > slowest.waitedLocked(now) {
			slowest = p
		}
	}
	if slowest.waitedLocked(now) > importPatience {
		slowest.yield = true
	}
}

func (p *importPlace) waitedLocked(now time.Time) time.Duration {
	if p.since.IsZero() {
		return p.waited
	}
	return p.waited + now.Sub(p.since)
}

// hold counts n more bytes that the import keeps in memory.
func (p *importPlace) hold(n int) error {
	g := p.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	more := max(0, p.bytes+n-importFreeBytes) - max(0, p.bytes-importFreeBytes)
	if g.bytes+more > importBytesMax || p.bytes+n-importFreeBytes > importTenantBytesMax {
		return fail(CodeOverloaded, "imports hold too much memory: %d bytes of all, %d of one", importBytesMax, importTenantBytesMax)
	}
	g.bytes += more
	p.bytes += n
	return nil
}

// reads tells that a read of the client's begins or ends at now.
func (p *importPlace) reads(begins bool, now time.Time) error {
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	p.waited, p.since = p.waitedLocked(now), time.Time{}
	if p.yield {
		return fail(CodeOverloaded, "the import came slowly and gave way to another one, try again")
	}
	if begins {
		p.since = now
	}
	return nil
}

// importBody is a bundle as its client sends it.
type importBody struct {
	io.Reader
	place *importPlace
}

func (b importBody) Read(data []byte) (int, error) {
	if err := b.place.reads(true, time.Now()); err != nil {
		return 0, err
	}
	n, err := b.Reader.Read(data)
	if late := b.place.reads(false, time.Now()); late != nil {
		return 0, late
	}
	return n, err
}
