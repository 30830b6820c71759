package sessions

import (
	"context"
	"math/rand/v2"

	"rocket/engine"
)

// CheckCacheRequest asks for a sample of the cache to be proved.
type CheckCacheRequest struct {
	Sample *float64 `json:"sample,omitempty" doc:"share of the snapshots, above 0 and at most 1; default 0.05"`
	Seed   *int64   `json:"seed,omitempty" doc:"which ones; drawn by default"`
}

// CheckCacheResult is what was found; Seed finds the same snapshots again while they are there.
type CheckCacheResult struct {
	Seed int64 `json:"seed"`
	engine.CacheCheck
}

// CheckSampleDefault is the share of snapshots that CheckCache looks at by itself.
const CheckSampleDefault = 0.05

// CheckCache proves a sample of what is cached, for all tenants: see engine.Engine.CheckCache. One at a time.
func (m *Manager) CheckCache(ctx context.Context, req CheckCacheRequest) (CheckCacheResult, error) {
	sample := CheckSampleDefault
	if req.Sample != nil {
		sample = *req.Sample
	}
	if !(sample > 0 && sample <= 1) {
		return CheckCacheResult{}, invalid("sample", "must be above 0 and at most 1")
	}
	seed := rand.Int64N(SeedDrawnMax)
	if req.Seed != nil {
		seed = *req.Seed
	}
	if err := m.checking.lock(ctx); err != nil {
		return CheckCacheResult{}, err
	}
	defer m.checking.unlock()
	got, err := m.eng.CheckCache(ctx, sample, uint64(seed))
	if err != nil {
		return CheckCacheResult{}, engineError("check cache", err, "")
	}
	return CheckCacheResult{seed, got}, nil
}
