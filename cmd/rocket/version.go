package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"rocket/server"
)

// release is set by the linker (-X main.release=v1.2.3) in released builds.
var release = ""

// buildVersion reads what the toolchain wrote into the binary.
func buildVersion() server.Version {
	v := server.Version{Version: release, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		if v.Version == "" {
			v.Version = info.Main.Version
		}
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				v.Commit = s.Value
			case "vcs.time":
				v.Time = s.Value
			case "vcs.modified":
				v.Dirty = s.Value == "true"
			}
		}
	}
	if v.Version == "" {
		v.Version = "(devel)"
	}
	return v
}

type versionCmd struct{}

func (versionCmd) Run(c *console) error {
	v := buildVersion()
	if c.json {
		return c.print(v)
	}
	line := fmt.Sprintf("rocket %s %s %s/%s", v.Version, v.Go, v.OS, v.Arch)
	if v.Commit != "" {
		line += " " + v.Commit[:min(12, len(v.Commit))]
		if v.Dirty {
			line += "+changes"
		}
	}
	c.say("%s", line)
	return nil
}
