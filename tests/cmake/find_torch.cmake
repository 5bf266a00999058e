# How torch is found: without a toolkit, without CUDA, and not at all. The
# project in find_torch/ is only configured; each case has a folder of its own.
file(REMOVE_RECURSE ${WORK_DIR})

# configure(<case> [<argument>...]) leaves `result` and `output`.
macro(configure case)
  execute_process(
    COMMAND
      ${CMAKE_COMMAND} -E env --unset=CUDACXX --unset=CUDA_HOME --unset=CUDA_PATH
      --unset=CMAKE_PREFIX_PATH --unset=VIRTUAL_ENV PATH=/usr/bin:/bin
      ${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/cmake/find_torch -B ${WORK_DIR}/${case}
      -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
      -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} ${ARGN}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
  )
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
endmacro()

# The toolkit is neither needed nor looked for.
configure(no_toolkit -DTorch_DIR=${TORCH_DIR})
file(STRINGS ${WORK_DIR}/no_toolkit/CMakeCache.txt cuda_entries REGEX "^CUDA|^CMAKE_CUDA")
if(NOT result EQUAL 0 OR cuda_entries)
  message(FATAL_ERROR "torch needs a toolkit (${cuda_entries}): ${output}")
endif()

# A torch without CUDA: this one's package files, edited so that `torch` does not
# link the CUDA library and asking for CUDA is an error.
set(share ${WORK_DIR}/cpu_only_torch/share/cmake)
cmake_path(GET TORCH_DIR PARENT_PATH torch_share)
file(COPY ${torch_share}/ DESTINATION ${share})
foreach(name include lib)
  file(CREATE_LINK ${torch_share}/../../${name} ${share}/../../${name} SYMBOLIC)
endforeach()
file(READ ${share}/Caffe2/Caffe2Config.cmake config)
string(REPLACE "set(CAFFE2_USE_CUDA" "cuda_was_asked_for(" config "${config}")
string(REGEX REPLACE "if\\((1|ON)\\)\n(  # The file public/cuda)" "if(OFF)\n\\2" config "${config}")
file(WRITE ${share}/Caffe2/Caffe2Config.cmake "${config}")
file(READ ${share}/Caffe2/Caffe2Targets.cmake targets)
string(REPLACE "\"torch_cpu_library;torch_cuda_library\"" "\"torch_cpu_library\"" targets "${targets}")
file(WRITE ${share}/Caffe2/Caffe2Targets.cmake "${targets}")
configure(cpu_only -DTorch_DIR=${share}/Torch)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "a torch without CUDA cannot be used: ${output}")
endif()

configure(not_found -DDATAPARALLEL_PYTHON=/bin/false)
if(result EQUAL 0 OR NOT output MATCHES "LibTorch was not found: pass -DDATAPARALLEL_PYTHON")
  message(FATAL_ERROR "a missing torch is not reported: ${output}")
endif()
