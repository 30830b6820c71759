package main

import (
	"strings"

	"rocket/engine/model"
	"rocket/engine/quant"
)

type modelQuantize struct {
	Source   string   `arg:"" help:"Folder of a checkpoint in BF16 or F32."`
	To       string   `help:"Format of the families that --families names: nvfp4 or fp8." placeholder:"FORMAT"`
	Families []string `help:"What to quantise: linear_attention, full_attention, routed_experts, shared_experts, base_routers, mtp; all is every one that the model has." placeholder:"NAME,..."`
	Map      []string `help:"One family and its format, for maps of several formats; can be given again." placeholder:"FAMILY=FORMAT"`
	Out      string   `help:"Folder below which the artifact's folder is made; its name is a digest of map and sources." required:"" placeholder:"DIR"`
}

// quantized is what --json prints.
type quantized struct {
	Dir         string         `json:"dir"`
	Digest      string         `json:"digest"`
	Existed     bool           `json:"existed"`
	Families    quant.Map      `json:"families"`
	Matrices    map[string]int `json:"matrices"`
	SourceBytes int64          `json:"source_bytes"`
	Bytes       int64          `json:"bytes"`
}

// families puts the flags together.
func (q modelQuantize) families(has func(model.Family) bool) (quant.Map, error) {
	m := quant.Map{}
	set := func(family, format string) error {
		f, err := model.ParseFamily(family)
		if err != nil {
			return usageError{err}
		}
		to, err := quant.ParseFormat(format)
		if err != nil {
			return usageError{err}
		}
		if m[f] != "" && m[f] != to {
			return usage("family %s is given two formats: %s and %s", f, m[f], to)
		}
		m[f] = to
		return nil
	}
	for _, pair := range q.Map {
		family, format, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, usage("--map: want FAMILY=FORMAT, not %q", pair)
		}
		if err := set(family, format); err != nil {
			return nil, err
		}
	}
	if (q.To == "") != (len(q.Families) == 0) {
		return nil, usage("--to and --families go together")
	}
	for _, name := range q.Families {
		if name != "all" {
			if err := set(name, q.To); err != nil {
				return nil, err
			}
			continue
		}
		for _, f := range model.Families {
			if has(f) {
				if err := set(string(f), q.To); err != nil {
					return nil, err
				}
			}
		}
	}
	if len(m) == 0 {
		return nil, usage("nothing to do: give --to and --families, or --map")
	}
	return m, nil
}

func (q modelQuantize) Run(c *console) error {
	dir, name, err := modelDir(q.Source)
	if err != nil {
		return err
	}
	r, err := model.Inspect(dir)
	if err != nil {
		return err
	}
	m, err := q.families(func(f model.Family) bool { return r.Families[f].Matrices > 0 })
	if err != nil {
		return err
	}
	update, done := c.progress("quantising " + name)
	result, err := quant.Run(c.ctx, quant.Options{Source: dir, Out: q.Out, Map: m, Progress: update})
	done()
	if err != nil {
		return err
	}
	out := quantized{result.Dir, result.Digest, result.Existed, m, map[string]int{}, result.SourceBytes, result.OutputBytes}
	for f, n := range result.Matrices {
		out.Matrices[string(f)] = n
	}
	if c.json {
		return c.print(out)
	}
	c.say("%s", out.Dir)
	c.say("%d B of tensors became %d B; matrices: %s%s", out.SourceBytes, out.Bytes, counts(out.Matrices),
		map[bool]string{true: " (it was there already)"}[out.Existed])
	return nil
}
