package sessions

import (
	"io"
	"sync"
	"time"
)

// Imports and exports go at the pace of their clients, and each has a
// connection to the ledger for as long, an export also a snapshot of it.
const (
	importsMax = 4 // at once, of different tenants, one of each; more: CodeOverloaded
	exportsMax = 4 // as well

	// When all places are taken and another tenant wants one, the bundle that is
	// the slowest ends with CodeOverloaded, if it has waited for its client for
	// more than bundlePatience, all its waits together, and has got less than
	// bundleRateMin in them. Whoever came gets CodeOverloaded too, and the place
	// when it comes again.
	bundlePatience = 10 * time.Second
	bundleRateMin  = 1 << 20 // bytes a second

	// importFreeBytes is what each import may hold in memory (its longest line,
	// its sessions, a few words for each turn and run). What they hold beyond it
	// is importBytesMax of all and importTenantBytesMax of one; the next byte is
	// CodeOverloaded.
	importFreeBytes      = 1 << 20
	importBytesMax       = 512 << 20
	importTenantBytesMax = 256 << 20
)

// bundleGate lets imports through, or exports.
type bundleGate struct {
	what   string // in errors
	most   int
	mu     sync.Mutex
	places map[string]*gatePlace // guarded by mu; by tenant
	bytes  int                   // guarded by mu; what all hold beyond what is free
}

// gatePlace is one bundle's.
type gatePlace struct {
	gate *bundleGate

	// Guarded by gate.mu.
	waited time.Duration // for the client, until since
	since  time.Time     // when the wait under way began; zero: none
	passed int64         // bytes that the client sent or took
	yield  bool          // another tenant wants the place
	bytes  int           // held
}

// enter gives a place, or CodeOverloaded. leave must be called after.
func (g *bundleGate) enter(tenant string, now time.Time) (p *gatePlace, leave func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.places[tenant] != nil {
		return nil, nil, fail(CodeOverloaded, "another %s is under way, try again", g.what)
	}
	if len(g.places) >= g.most {
		g.hurryLocked(now)
		return nil, nil, fail(CodeOverloaded, "%d %ss are under way, try again", g.most, g.what)
	}
	if g.places == nil {
		g.places = map[string]*gatePlace{}
	}
	p = &gatePlace{gate: g}
	g.places[tenant] = p
	return p, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.bytes -= max(0, p.bytes-importFreeBytes)
		delete(g.places, tenant)
	}, nil
}

// hurryLocked tells the slowest bundle to give way, if it is too slow.
func (g *bundleGate) hurryLocked(now time.Time) {
	var slowest *gatePlace
	for _, p := range g.places {
		wait := p.waitedLocked(now)
		slow := wait > bundlePatience && float64(p.passed) < wait.Seconds()*bundleRateMin
		if slow && (slowest == nil || wait > slowest.waitedLocked(now)) {
			slowest = p
		}
	}
	if slowest != nil {
		slowest.yield = true
	}
}

func (p *gatePlace) waitedLocked(now time.Time) time.Duration {
	if p.since.IsZero() {
		return p.waited
	}
	return p.waited + now.Sub(p.since)
}

// hold counts n more bytes that the import keeps in memory.
func (p *gatePlace) hold(n int) error {
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

// begins tells that the client is waited for from now on.
func (p *gatePlace) begins(now time.Time) error { return p.moves(0, now, now) }

// ends tells that n bytes have come or gone, and the wait is over.
func (p *gatePlace) ends(n int, now time.Time) error { return p.moves(n, now, time.Time{}) }

func (p *gatePlace) moves(n int, now, since time.Time) error {
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	p.waited, p.since = p.waitedLocked(now), time.Time{}
	p.passed += int64(n)
	if p.yield {
		return fail(CodeOverloaded, "the %s was slow and gave way to another one, try again", p.gate.what)
	}
	p.since = since
	return nil
}

// importBody is a bundle as its client sends it.
type importBody struct {
	io.Reader
	place *gatePlace
}

func (b importBody) Read(data []byte) (int, error) {
	if err := b.place.begins(time.Now()); err != nil {
		return 0, err
	}
	n, err := b.Reader.Read(data)
	if late := b.place.ends(n, time.Now()); late != nil {
		return 0, late
	}
	return n, err
}

// exportBody is a bundle as its client takes it.
type exportBody struct {
	io.Writer
	place *gatePlace
}

func (b exportBody) Write(data []byte) (int, error) {
	if err := b.place.begins(time.Now()); err != nil {
		return 0, err
	}
	n, err := b.Writer.Write(data)
	if late := b.place.ends(n, time.Now()); err == nil && late != nil {
		return n, late
	}
	return n, err
}
