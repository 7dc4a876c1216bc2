/* Linked with native/ and the sanitizers: where they report, since the guest has no standard error. */
const char *__asan_default_options(void);
const char *__ubsan_default_options(void);

#define OPTIONS "log_path=" REPORTS ":detect_leaks=0:handle_abort=1:print_stacktrace=1"

const char *__asan_default_options(void)
{
    return OPTIONS;
}

const char *__ubsan_default_options(void)
{
    return OPTIONS;
}
