package main

import "fmt"

type checkCacheCmd struct {
	remote
	Sample float64 `help:"Share of the cached snapshots to prove, above 0 and at most 1." default:"0.05"`
}

// Run fails when something was wrong, so that a script notices.
func (k checkCacheCmd) Run(c *console) error {
	if !(k.Sample > 0 && k.Sample <= 1) {
		return usage("--sample: want more than 0 and at most 1, not %v", k.Sample)
	}
	api, err := k.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	got, err := api.CheckCache(c.ctx, k.Sample)
	if err != nil {
		return err
	}
	if c.json {
		if err := c.print(got); err != nil {
			return err
		}
	} else {
		c.say("%d of %d snapshots: %d states and %d pages recomputed, %d stored copies verified, %d skipped",
			got.Sampled, got.Snapshots, got.Recomputed, got.Pages, got.Stored, got.Skipped)
		for _, m := range got.Mismatches {
			c.say("wrong, dropped: %s", m)
		}
	}
	if n := len(got.Mismatches); n > 0 {
		return fmt.Errorf("check cache: %d mismatches (seed %d)", n, got.Seed)
	}
	return nil
}
