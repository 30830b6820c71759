package kernels

import (
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh200"
)

func TestGPUs(t *testing.T) {
	list, err := gpus(dgxh200.New())
	if err != nil || len(list) != 8 {
		t.Fatalf("%d gpus, error %v", len(list), err)
	}
	seen := map[string]bool{}
	for _, g := range list {
		if seen[g.UUID] || g.Driver != "550.54.15" || !strings.Contains(g.Name, "H200") || g.MemoryBytes < 140<<30 {
			t.Errorf("gpu %+v", g)
		}
		seen[g.UUID] = true
	}
}

func TestGPUFailures(t *testing.T) {
	for ret, want := range map[nvml.Return]error{
		nvml.ERROR_LIBRARY_NOT_FOUND: nil,
		nvml.ERROR_DRIVER_NOT_LOADED: nil,
		nvml.ERROR_NO_PERMISSION:     nvml.ERROR_NO_PERMISSION,
	} {
		lib := dgxh200.New()
		lib.InitFunc = func() nvml.Return { return ret }
		if list, err := gpus(lib); len(list) != 0 || !errors.Is(err, want) {
			t.Errorf("init %v: %d gpus, error %v", ret, len(list), err)
		}
	}
	lib := dgxh200.New()
	lib.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) { return nil, nvml.ERROR_GPU_IS_LOST }
	if _, err := gpus(lib); !errors.Is(err, nvml.ERROR_GPU_IS_LOST) {
		t.Errorf("lost gpu: error %v", err)
	}
}

// The real library: a machine without a driver has an empty list and no error.
func TestGPUsHere(t *testing.T) {
	if _, err := GPUs(); err != nil {
		t.Error(err)
	}
}
