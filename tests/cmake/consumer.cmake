# Builds and runs the consumer: AS=install finds the installed package,
# AS=subdirectory adds the source folder.
if(AS STREQUAL "install")
  set(library -DCMAKE_PREFIX_PATH=${BUILD_DIR}/tests/cmake/prefix)
  file(REMOVE_RECURSE ${WORK_DIR})
else()
  # Kept from run to run: this one compiles the library.
  set(library -DDATAPARALLEL_SOURCE_DIR=${SOURCE_DIR})
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
