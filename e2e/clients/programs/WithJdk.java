import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.List;

/** The JDK's own client, which offers HTTP/2 in its first request: java WithJdk.java HTTP_2, or HTTP_1_1. */
public class WithJdk {
    private static final String URL = System.getenv("PLAIT_URL");
    private static final String KEY = System.getenv("PLAIT_KEY");

    interface Feature {
        boolean works(HttpClient client) throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.valueOf(arguments[0])).build();
        say("models", client, WithJdk::models);
        say("chat", client, WithJdk::chat);
        say("stream", client, WithJdk::stream);
        say("wrong model", client, WithJdk::wrongModel);
        say("wrong key", client, WithJdk::wrongKey);
    }

    private static void say(String name, HttpClient client, Feature feature) {
        boolean works;
        String detail = "";
        try {
            works = feature.works(client);
        } catch (Exception error) {
            works = false;
            detail = error.toString().replace('"', '\'');
        }
        System.out.printf("{\"feature\":\"%s\",\"ok\":%b,\"detail\":\"%s\"}%n", name, works, detail);
    }

    private static HttpRequest.Builder asking(String path, String key) {
        return HttpRequest.newBuilder(URI.create(URL + path)).header("authorization", "Bearer " + key);
    }

    private static HttpRequest chatOf(String model, String key, boolean streamed) {
        String body = "{\"model\":\"" + model + "\",\"max_tokens\":8,\"stream\":" + streamed
            + ",\"messages\":[{\"role\":\"user\",\"content\":\"Is it raining?\"}]}";
        return asking("/v1/chat/completions", key).header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body)).build();
    }

    private static HttpResponse<String> sent(HttpClient client, HttpRequest request) throws Exception {
        return client.send(request, HttpResponse.BodyHandlers.ofString());
    }

    private static boolean models(HttpClient client) throws Exception {
        HttpResponse<String> answer = sent(client, asking("/v1/models", KEY).build());
        return answer.statusCode() == 200 && answer.body().contains("\"demo\"");
    }

    private static boolean chat(HttpClient client) throws Exception {
        HttpResponse<String> answer = sent(client, chatOf("demo", KEY, false));
        return answer.statusCode() == 200 && answer.body().contains("\"finish_reason\":\"length\"");
    }

    private static boolean stream(HttpClient client) throws Exception {
        HttpResponse<java.util.stream.Stream<String>> answer =
            client.send(chatOf("demo", KEY, true), HttpResponse.BodyHandlers.ofLines());
        List<String> lines = answer.body().filter(line -> line.startsWith("data: ")).toList();
        return answer.statusCode() == 200 && lines.size() > 2 && lines.get(lines.size() - 1).equals("data: [DONE]");
    }

    private static boolean wrongModel(HttpClient client) throws Exception {
        return sent(client, chatOf("nope", KEY, false)).statusCode() == 404;
    }

    private static boolean wrongKey(HttpClient client) throws Exception {
        return sent(client, chatOf("demo", "nobody", false)).statusCode() == 401;
    }
}
