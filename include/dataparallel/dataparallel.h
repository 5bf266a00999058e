#pragma once

/// All of the library but the simulated devices.

#include <dataparallel/data_parallel.h>
#include <dataparallel/devices.h>
#include <dataparallel/nested.h>
#include <dataparallel/parallel_apply.h>
#include <dataparallel/replicate.h>
#include <dataparallel/scatter_gather.h>
