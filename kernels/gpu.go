package kernels

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// GPU is one NVIDIA device as its driver describes it.
type GPU struct {
	Name, UUID, Driver string
	MemoryBytes        uint64
}

// GPUs lists the NVIDIA devices of this machine. Without a driver the list is empty and the error nil: the driver's
// library is looked for at run time.
func GPUs() ([]GPU, error) { return gpus(nvml.New()) }

func gpus(lib nvml.Interface) (list []GPU, err error) {
	switch ret := lib.Init(); ret {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED:
		return nil, nil
	default:
		return nil, fmt.Errorf("start nvml: %w", ret)
	}
	defer func() {
		if ret := lib.Shutdown(); ret != nvml.SUCCESS {
			err = errors.Join(err, fmt.Errorf("stop nvml: %w", ret))
		}
	}()
	driver, ret := lib.SystemGetDriverVersion()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read driver version: %w", ret)
	}
	n, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count gpus: %w", ret)
	}
	for i := range n {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("open gpu %d: %w", i, ret)
		}
		g := GPU{Driver: driver}
		memory := nvml.Memory{}
		if g.Name, ret = d.GetName(); ret == nvml.SUCCESS {
			if g.UUID, ret = d.GetUUID(); ret == nvml.SUCCESS {
				memory, ret = d.GetMemoryInfo()
			}
		}
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("describe gpu %d: %w", i, ret)
		}
		g.MemoryBytes = memory.Total
		list = append(list, g)
	}
	return list, nil
}
