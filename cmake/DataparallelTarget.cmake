# What every compiled target of this project shares, and what makes a library
# of it one of the libraries that are installed.

# Warnings, sanitizers and C++20 for a target of ours. torch's headers come
# from imported targets, so the compiler takes them as system headers and the
# warnings apply to our code alone.
function(dataparallel_configure_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # False alarms of GCC 12 at `"text" + std::string` (its bug 105651).
    target_compile_options(${target} PRIVATE -Wno-restrict -Wno-stringop-overflow)
  endif()
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin
  )
  if(DATAPARALLEL_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(DATAPARALLEL_PRECOMPILE_HEADERS AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess) # for ccache
  endif()
  if(DATAPARALLEL_SANITIZE)
    # vptr needs type information that torch's hidden classes do not export.
    set(flags -fsanitize=${DATAPARALLEL_SANITIZE} -fno-sanitize=vptr)
    target_compile_options(${target} PRIVATE ${flags} -fno-omit-frame-pointer)
    # GCC warns falsely of the standard library's own code when it instruments.
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    target_link_options(${target} PRIVATE ${flags})
  endif()
endfunction()

# dataparallel_add_library(<target> EXPORT_HEADER <name> SOURCES <file>...)
# adds a library with hidden visibility and the generated header
# <dataparallel/<name>> with the macro <TARGET>_EXPORT. Nothing is precompiled:
# GCC instantiates all that <torch/torch.h> asks for again in every file, which
# takes longer than the few headers that ours include.
function(dataparallel_add_library target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "EXPORT_HEADER" "SOURCES")
  set(type STATIC)
  if(DATAPARALLEL_BUILD_SHARED)
    set(type SHARED)
  endif()
  add_library(${target} ${type} ${arg_SOURCES})
  dataparallel_configure_target(${target})
  set_target_properties(
    ${target}
    PROPERTIES
      CXX_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
      POSITION_INDEPENDENT_CODE ON
      INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib" # beside torch in a wheel
      INSTALL_RPATH_USE_LINK_PATH ${DATAPARALLEL_INSTALL_TORCH_RPATH}
  )
  generate_export_header(
    ${target}
    EXPORT_FILE_NAME ${PROJECT_BINARY_DIR}/include/dataparallel/${arg_EXPORT_HEADER}
  )
  if(NOT DATAPARALLEL_BUILD_SHARED)
    string(TOUPPER ${target} upper)
    target_compile_definitions(${target} PUBLIC ${upper}_STATIC_DEFINE)
  endif()
  target_include_directories(
    ${target}
    PUBLIC
      $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
      $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
      $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/csrc
  )
  target_link_libraries(${target} PUBLIC torch)
endfunction()
