# Builds and runs the consumer: AS=install finds the installed package,
# AS=subdirectory adds the source folder.
if(AS STREQUAL "install")
  set(library -DCMAKE_PREFIX_PATH=${BUILD_DIR}/tests/cmake/prefix)
  file(REMOVE_RECURSE ${WORK_DIR})
else()
  # Kept from run to run: this one compiles the library, in few and large units,
  # as a project may that has CMAKE_UNITY_BUILD on.
  set(library -DDATAPARALLEL_SOURCE_DIR=${SOURCE_DIR} -DCMAKE_UNITY_BUILD=ON
      -DCMAKE_UNITY_BUILD_BATCH_SIZE=16 -DCMAKE_CXX_FLAGS_RELEASE=-O0)
endif()

execute_process(
  COMMAND
    ${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/consumer -B ${WORK_DIR} -G ${GENERATOR}
    ${library} -DTorch_DIR=${TORCH_DIR} -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${CXX_LAUNCHER}
  COMMAND_ERROR_IS_FATAL ANY
)
execute_process(
  COMMAND ${CMAKE_COMMAND} --build ${WORK_DIR} --target consumer
  COMMAND_ERROR_IS_FATAL ANY
)
execute_process(COMMAND ${WORK_DIR}/consumer COMMAND_ERROR_IS_FATAL ANY)
