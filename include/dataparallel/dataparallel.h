#pragma once

/// All of the library but the simulated devices.

#include <dataparallel/checkpoint.h>
#include <dataparallel/data_parallel.h>
#include <dataparallel/devices.h>
#include <dataparallel/nested.h>
#include <dataparallel/parallel_apply.h>
#include <dataparallel/python_values.h>
#include <dataparallel/replicate.h>
#include <dataparallel/save.h>
#include <dataparallel/scatter_gather.h>
#include <dataparallel/state_dict.h>
